"""The campaign's windows."""
