"""Plug-ins that put the codec inside other engines. Each file is loaded by its engine and imports that engine."""
