"""Workers of Dask: processes of one thread, and what kills one of them."""

import contextlib
import os
import signal

import pytest

distributed = pytest.importorskip("distributed")


@pytest.fixture(name="workers")
def started_workers(request):
    """A client with this number of workers, which are processes of one thread."""
    with (
        distributed.LocalCluster(request.param, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.wait_for_workers(request.param)
        yield client


def die_once(marker):
    with contextlib.suppress(FileExistsError, ValueError):
        distributed.get_worker()  # not the client, which calls functions to see what they return
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        os.kill(os.getpid(), signal.SIGKILL)
