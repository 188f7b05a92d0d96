"""Small helpers without a package of their own: progress bar, host transfers, huge pages, rotary tables."""
