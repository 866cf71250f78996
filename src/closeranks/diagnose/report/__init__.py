"""Reports of a verdict: terminal, JSON, Markdown, an upstream bug report, a self-contained page.

Every report is built from the verdict's parsed fields and passes through redaction as a whole.
"""
