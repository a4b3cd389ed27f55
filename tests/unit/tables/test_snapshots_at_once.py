"""Several workers write a table down to one folder at the same time."""

from __future__ import annotations

import threading

import torch

from phalanx import tables


def test_workers_that_write_to_one_folder_at_once_leave_a_snapshot_that_counts(tmp_path):
    failures: list[BaseException] = []

    def write_many(world: tables.TableGroup) -> None:
        table = world.matrix(16, 4, name="x")
        try:
            for row in range(30):
                table.add(torch.full((1, 4), world.worker_id + 1.0), rows=[row % 16])
                table.snapshot(tmp_path)
        except BaseException as exc:
            failures.append(exc)

    with tables.join() as world:
        table = world.matrix(16, 4, name="x")
        workers = [world.thread_worker() for _ in range(3)]
        threads = [threading.Thread(target=write_many, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        table.restore(tmp_path)
        assert len(list(tmp_path.iterdir())) == 2  # and nothing half written is left
        for worker in workers:
            worker.close()
