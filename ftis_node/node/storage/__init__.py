"""Disk use of a home: quota, cleanup, log rotation, exports."""
