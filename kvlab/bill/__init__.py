"""Bill: what a released model costs on a device, method by method, by arithmetic alone."""

from .bill import Bill, Line, bill

__all__ = ["Bill", "Line", "bill"]
