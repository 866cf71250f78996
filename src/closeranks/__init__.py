"""Prefill-decode disaggregated LLM serving that cannot wedge in silence, and the instruments to end such failures."""

__version__ = "0.1.0"
