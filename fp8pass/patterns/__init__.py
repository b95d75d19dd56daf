"""Rules over the generic operators; see :mod:`fp8pass.patterns.rule` for what a rule is."""
