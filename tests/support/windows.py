"""Makes Linux lack what Windows lacks, for the rest of a process: a prelude of scripts, before they import selfattn.

Names of `os` and modules are gone, folders cannot be opened, and a file that this process has open or mapped can be
neither replaced nor removed. Code pages, paths with drives and consoles are not imitated.
"""

import concurrent.futures
import multiprocessing.connection
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile

import numpy as np

# Of the names that this project, NumPy or Python's library use.
NAMES = "fork register_at_fork sched_getaffinity fchmod fchown chown getuid geteuid uname statvfs pread killpg getsid "
NAMES += "O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_SYNC posix_fadvise sysconf mkfifo getloadavg"
MODULES = "fcntl resource termios tty pty pwd grp readline syslog"
LOADED = (
    concurrent.futures,
    multiprocessing.connection,
    sqlite3,
    subprocess,
    tempfile,
    np,
)  # which have their own


def is_open(path):
    """Return whether this process has a file open or mapped."""
    place = os.path.realpath(path)
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
    opened = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            opened.add(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:  # that of the list itself
            continue
    return os.path.exists(place) and place in mapped | opened


def refused(path):
    error = PermissionError(13, "Access is denied", os.fspath(path))
    error.winerror = 5
    return error


def guarded(function):
    """Return a function of files that refuses those that are open."""

    def call(*paths, **options):
        for path in paths:
            if is_open(path):
                raise refused(path)
        return function(*paths, **options)

    return call


def become_windows():
    open_file = os.open

    def open_no_folder(path, *given, **options):
        if os.path.isdir(path):
            raise refused(path)
        return open_file(path, *given, **options)

    for name in NAMES.split():
        delattr(os, name)
    sys.modules |= dict.fromkeys(MODULES.split())
    shutil._use_fd_functions = False
    os.open = open_no_folder
    os.replace, os.rename, os.unlink, os.remove = map(guarded, (os.replace, os.rename, os.unlink, os.remove))
