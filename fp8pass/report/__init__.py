"""Explaining: what happened at every site (records), where it is kept, and how it is shown."""

from fp8pass.report.collector import add, clear, collecting, reports
from fp8pass.report.dump import (
    Dump,
    describe_dump,
    emit_record,
    emit_to_tools,
    load_dump,
    show_graph,
)
from fp8pass.report.graph_text import count_ops, graph_text
from fp8pass.report.record import GraphRecord, Report, merge
from fp8pass.report.site import KINDS, STATUSES, Rejected, Site

__all__ = [
    "KINDS",
    "STATUSES",
    "Dump",
    "GraphRecord",
    "Rejected",
    "Report",
    "Site",
    "add",
    "clear",
    "collecting",
    "count_ops",
    "describe_dump",
    "emit_record",
    "emit_to_tools",
    "graph_text",
    "load_dump",
    "merge",
    "reports",
    "show_graph",
]
