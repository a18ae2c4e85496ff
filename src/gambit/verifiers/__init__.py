"""Verifiers: second models that read the problem and the thoughts of a trace and score the newest one."""
