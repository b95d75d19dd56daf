"""The reason catalogue: why something was read or not, fused or not, lowered or not.

Every decision of fp8pass is a :class:`Verdict`. A verdict that says no carries a stable code from
:data:`CATALOGUE`, a message that names the failing condition *and the value that failed it*, and a
hint on what would change the answer. Codes are never reused; messages may get better.

Ranges: FP8-R reading, FP8-F fusing, FP8-L lowering, FP8-P the pass and its hooks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reason:
    """One entry of the catalogue; ``template`` is filled in by :func:`no`."""

    code: str
    title: str
    template: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a condition. Truthy when the condition holds."""

    ok: bool
    code: str = ""
    message: str = ""
    hint: str = ""

    def __bool__(self) -> bool:
        return self.ok


YES = Verdict(True)


def no(code: str, **values: object) -> Verdict:
    """A refusal with ``code``; ``values`` fill the template of the catalogue entry.

    Raises ``KeyError`` if the code or one of its template's values is missing: a reason without its
    value would be as useless to the reader as no reason at all.
    """
    reason = CATALOGUE[code]
    return Verdict(False, code, reason.template.format(**values), reason.hint.format(**values))


def _catalogue(*reasons: Reason) -> dict[str, Reason]:
    table = {reason.code: reason for reason in reasons}
    if len(table) != len(reasons):
        raise ValueError("two reasons share one code")
    return table


CATALOGUE: dict[str, Reason] = _catalogue(
    # ---- reading -------------------------------------------------------------------------------
    Reason(
        "FP8-R001",
        "a cast to fp8 or int8 that is not a known quantisation",
        "the cast to {dtype} at {node} is not a quantisation that fp8pass can read: {why}",
        "docs/numerics.md lists the spellings that are read; an unknown rounding order is never "
        "guessed",
    ),
    Reason(
        "FP8-R002",
        "a product whose scales were not understood",
        "the scaled product {node} is not read: {why}",
        "fp8 or int8 operands with float32 scales are read: per tensor, one per row or column "
        "([M, 1], [1, N]), per group of K ([M, K / n]) and per block of the weight; "
        "docs/numerics.md has the spellings",
    ),
    Reason(
        "FP8-R003",
        "a norm that is not read",
        "the input of this quantise comes from a norm at {node} that fp8pass cannot read: {why}",
        "docs/numerics.md lists the norms that are read; another function is never taken for one",
    ),
    Reason(
        "FP8-R004",
        "an activation that is not read",
        "the input of this quantise is made by {producer}, which looks like an activation that is "
        "not read: {why}",
        "docs/numerics.md lists the activations that are read; another rounding order or constant "
        "is never guessed",
    ),
    Reason(
        "FP8-R005",
        "a weight-only product that is not read",
        "the product {node} multiplies activations that are not quantised by an fp8 weight "
        "(W8A16), in a way that is not read: {why}",
        "nothing to do: the code generator fuses what makes the weight wide with the work around",
    ),
    Reason(
        "FP8-R010",
        "an operator of a quantisation library that was not read",
        "the operator {op} at {node} is not read: {why}",
        "docs/dialects.md says which operators of which libraries are read",
    ),
    Reason(
        "FP8-R011",
        "fused already, by the engine that made the graph",
        "{op} at {node} is a fusion of {dialect}'s own: {what}",
        "nothing to do; to have fp8pass choose the kernel instead, let it run before those fusions",
    ),
    Reason(
        "FP8-R012",
        "a product in a kernel that the engine chose, which is kept",
        "{op} at {node} is a product that {dialect} has given a kernel: {what}",
        "nothing to do; another backend of the engine may give a product that fp8pass reads",
    ),
    # ---- fusing --------------------------------------------------------------------------------
    Reason(
        "FP8-F001",
        "no quantise reads it",
        "no quantise to fp8 or int8 reads the output of this {what}; it is read by {readers}",
        "nothing to do: only a producer that feeds a quantised product can be fused",
    ),
    Reason(
        "FP8-F002",
        "the quantise has no producer that can be fused",
        "the input of this quantise is made by {producer}, which is neither a norm nor an "
        "activation",
        "nothing to do: the code generator fuses the quantise with the work around it",
    ),
    Reason(
        "FP8-F003",
        "the scale depends on the value that is quantised",
        "the scale {scale} is computed from the output of the {what} in a way that is not a known "
        "quantisation, so that fusing would make a cycle",
        "compute the scale as one of the recipes in docs/numerics.md",
    ),
    Reason(
        "FP8-F004",
        "a second quantisation of the same producer",
        "{node} quantises the same {what} in another way ({key}) than the one that was fused "
        "({fused})",
        "use one input scale for all linears that read this tensor",
    ),
    Reason(
        "FP8-F006",
        "operands on different devices",
        "{node} has operands on {devices}",
        "",
    ),
    Reason(
        "FP8-F007",
        "rewriting was stopped by the fuel limit",
        "the fuel limit of {fuel} rewrites (option fuel, FP8PASS_FUEL) was reached",
        "raise or unset the limit",
    ),
    Reason(
        "FP8-F008",
        "a reshape between producer and quantise mixes rows",
        "the reshape from {before} to {after} between the {what} and its per-token quantise does "
        "not keep the last dimension",
        "quantise before the reshape, or reshape only the leading dimensions",
    ),
    Reason(
        "FP8-F030",
        "the upper bound of the scale is a tensor",
        "the scale of the quantise {node} is bounded by the tensor {bound} (scale_ub), which fused "
        "operators do not take",
        "bound the scale by a number: it is part of the recipe then, and the quantise is fused",
    ),
    # ---- lowering: see lowerings/ ---------------------------------------------------------------
    Reason(
        "FP8-L001",
        "the kernel is for another kind of device",
        "kernel {kernel} runs on {wants}, the target is {target}",
        "",
    ),
    Reason(
        "FP8-L002",
        "the kernel was disabled by the user",
        "kernel {kernel} is disabled (option disable, FP8PASS_DISABLE or VLLM_DISABLED_KERNELS)",
        "remove it there",
    ),
    Reason(
        "FP8-L003",
        "granularity of the scales",
        "kernel {kernel} takes {wants} scales, the site has {has}",
        "",
    ),
    Reason(
        "FP8-L004",
        "needs prepare",
        "kernel {kernel} needs weights prepared for it",
        "call fp8pass.prepare(model) before compiling; it costs 2 more bytes per weight",
    ),
    Reason(
        "FP8-L005",
        "not supported by this version of torch",
        "kernel {kernel} needs torch {wants} or newer on {target}, this is {has}",
        "",
    ),
    Reason(
        "FP8-L006",
        "too slow to be chosen",
        "kernel {kernel} works on {target} but is slow there ({why})",
        "force it by name to use it all the same",
    ),
    Reason(
        "FP8-L007",
        "dtype",
        "kernel {kernel} does not take {what} {has}; it takes {wants}",
        "",
    ),
    Reason(
        "FP8-L008",
        "layout",
        "kernel {kernel} needs {what} {wants}, the site has {has}",
        "",
    ),
    Reason(
        "FP8-L009",
        "alignment",
        "kernel {kernel} needs {what} to be a multiple of {wants}, it is {has}",
        "",
    ),
    Reason(
        "FP8-L010",
        "bias",
        "kernel {kernel} takes {wants} as bias, the site has {has}",
        "",
    ),
    Reason(
        "FP8-L011",
        "architecture",
        "kernel {kernel} needs {wants}, the target is {target}",
        "",
    ),
    Reason(
        "FP8-L012",
        "no kernel takes this site",
        "no kernel takes this site on {target}; the graph keeps the operator it came with",
        "the rejected kernels say why, one by one",
    ),
    Reason(
        "FP8-L013",
        "another kernel comes first",
        "kernel {kernel} could take the site; {chosen} took precedence ({why})",
        "force or prefer it by name to use it",
    ),
    Reason(
        "FP8-L014",
        "number of rows",
        "kernel {kernel} takes {wants} rows, the site has {has}",
        "",
    ),
    Reason(
        "FP8-L015",
        "the operands are on another device",
        "kernel {kernel} is for {wants} devices, the operands of the site are on {has}",
        "compile for the device that the graph runs on",
    ),
    Reason(
        "FP8-L016",
        "accumulation",
        "kernel {kernel} accumulates in less than float32, which the source does not allow",
        'pass use_fast_accum=True to torch._scaled_mm, or set numerics="fast"',
    ),
    Reason(
        "FP8-L017",
        "a limit of the kernel",
        "kernel {kernel} does not take {what}",
        "",
    ),
    Reason(
        "FP8-L040",
        "the kernel is for a weight-only product",
        "kernel {kernel} multiplies activations that are not quantised: other numbers than the "
        "source's (more exact; relative L2 about 2.6 % away for e4m3 codes and a scale that fits), "
        "so it is used on request alone",
        "force or prefer it (or w8a16, the best of its kind) by name",
    ),
    Reason(
        "FP8-L041",
        "the kernel is for quantised activations",
        "kernel {kernel} takes quantised activations, those of the site are {has}",
        "",
    ),
    Reason(
        "FP8-L042",
        "activations before the quantise",
        "the product {node} cannot be made a weight-only one: {why}",
        "quantise the activations as one of the recipes in docs/numerics.md, and multiply by that "
        "scale",
    ),
    Reason(
        "FP8-L043",
        "the quantise cuts values off",
        "the product {node} cannot be made a weight-only one: its quantise cuts values off, which "
        "is part of the function and not rounding: {why}",
        "take the bound off the scale, or ask for w8a16 at other sites alone (SITES=w8a16)",
    ),
    Reason(
        "FP8-L070",
        "the kernel did not do well on this device",
        "kernel {kernel} is not used for this product on this device, where it was tried: {why}",
        "if that was mended, delete the file of measurements (docs/tuning.md) or set tune='off'",
    ),
    # FP8-L080 and on: kernels of other libraries on CUDA
    Reason(
        "FP8-L080",
        "numerics not shown",
        "kernel {kernel} is not known to keep the numerics contract: {why}",
        "force it by name to have it, best with self_check=True, which compares it first",
    ),
    # FP8-L060 and on: ROCm, and architectures that are not known
    Reason(
        "FP8-L060",
        "needs prepare: e4m3fnuz",
        "kernel {kernel} takes float8_e4m3fnuz on {target}, the site has {what} of float8_e4m3fn",
        'call fp8pass.prepare(model, "{target}") before compiling: it converts the weights of '
        "Fp8Linear and their inputs to e4m3fnuz and doubles the scales, at no cost of memory",
    ),
    Reason(
        "FP8-L061",
        "the architecture is not known",
        "kernel {kernel} was written for architectures that are known, and nothing is known of "
        "{target}",
        "the graph keeps the operators it came with; Target.parse lists the known names",
    ),
    Reason(
        "FP8-L062",
        "version of a library",
        "kernel {kernel} needs {library} {wants} or newer for {what}, the target {target} has "
        "{has}",
        "name the version in the target, as in gfx942+vllm==0.21, if it is newer",
    ),
    Reason(
        "FP8-L063",
        "numerics contract",
        "kernel {kernel} does not round as the source does: {why}",
        'set numerics="fast", or prefer the kernel by name',
    ),
    Reason(
        "FP8-L069",
        "numbers of its own",
        "kernel {kernel} gives other numbers than the source: {why}",
        "prefer or force the kernel by name",
    ),
    Reason(
        "FP8-L064",
        "needs prepare: a weight in tiles",
        "kernel {kernel} needs a copy of the weight laid out in tiles for {target}, which the site "
        "does not carry",
        'call fp8pass.prepare(model, "{target}", shuffle=True) before compiling; it costs one more '
        "byte per weight",
    ),
    # ---- the pass and its hooks ------------------------------------------------------------------
    Reason(
        "FP8-P001",
        "the graph is for training",
        "the graph requires grad ({why}); fp8pass rewrites inference graphs only",
        "compile and call the model under torch.no_grad() or torch.inference_mode()",
    ),
    Reason(
        "FP8-P002",
        "ahead-of-time compilation",
        "AOTInductor packages run without Python, where the operators of fp8pass do not exist",
        "use torch.compile, or compile the package without fp8pass",
    ),
    Reason(
        "FP8-P003",
        "a step of the pass failed",
        "step {step} failed at {node}: {error}; the graph was restored and is compiled without "
        "fp8pass",
        "please report it with the folder {repro}",
    ),
    Reason(
        "FP8-P004",
        "nothing to do",
        "there is no FP8 in this graph",
        "",
    ),
    Reason(
        "FP8-P005",
        "several devices",
        "the graph has FP8 nodes on {devices}; the pass was made for {target}",
        "leave the option target out (fp8pass.graphs_for shows the graph of another device), and "
        "compile the parts for each device separately",
    ),
)
