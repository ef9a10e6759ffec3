"""The certificate of a device: what this program does there, tried in a child process before a run relies on it.

`trials` says what is tried; `child` is the process that tries it and may crash, hang or exit; `making` starts it and
collects what it wrote; `store` keeps the results for this device, these versions and this kind of job; `verdict` says
what follows from them.
"""
