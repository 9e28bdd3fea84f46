"""How often the audit errs, measured: see `tools/audit_error_rates.py`."""
