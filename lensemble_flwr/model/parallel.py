"""``inner.parallel``: H local steps in several processes of one participant, with the result of one.

The caller starts them as plain programs (a spawn would run the caller's main script again) and hands everything over a
pipe, so no private data touches a disk. On CPUs they talk by gloo through a file store in a folder of their own; with a
GPU for each, by NCCL (not tested: no machine with GPUs was at hand).
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from lensemble_flwr.errors import ContractViolation, LensembleError

_PROGRAM = "import sys; from lensemble_flwr.model.parallel import main; sys.exit(main(sys.argv[1:]))"

# gloo listens on the address of the host's name otherwise, and asks nobody who connects for anything.
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _feed(process: subprocess.Popen[bytes], data: bytes, out: dict[int, bytes], rank: int) -> None:
    out[rank] = process.communicate(data)[0]


def run_parallel(size: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run ``job`` (see :func:`_work`) in ``size`` processes.

    Args:
        job: picklable arguments of the local steps.

    Returns:
        What process 0 found.

    Raises:
        LensembleError: the first error of a process, as it was raised there.
        ContractViolation: a process died.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    job = {**job, "threads": max(1, torch.get_num_threads() // size)}
    answers: dict[int, bytes] = {}
    with tempfile.TemporaryDirectory(prefix="lensemble-team-") as folder:
        processes, feeders = [], []
        try:
            for rank in range(size):
                environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": _LOOPBACK}
                command = [sys.executable, "-c", _PROGRAM, str(rank), str(size), folder]
                # What it says of private data goes into the error, for the site's own log, and not to our stderr.
                with open(Path(folder, f"{rank}.err"), "wb") as errors:
                    processes.append(
                        subprocess.Popen(
                            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
                        )
                    )
            data = _dump(job)
            for rank, process in enumerate(processes):
                feeders.append(threading.Thread(target=_feed, args=(process, data, answers, rank), daemon=True))
                feeders[-1].start()
            _wait(processes)
            for feeder in feeders:
                feeder.join()
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        said = [Path(folder, f"{rank}.err").read_bytes()[-2000:].decode(errors="replace") for rank in range(size)]
    for rank in range(size):
        found = torch.load(io.BytesIO(answers[rank]), weights_only=False) if answers.get(rank) else {}
        if "error" in found:
            raise found["error"]
        if processes[rank].returncode:
            raise ContractViolation(
                f"A process of the local training ended with exit status {processes[rank].returncode}.",
                f"Use inner.parallel=1 to train in one process. It said: {said[rank].strip() or 'nothing'}",
            )
    result: dict[str, Any] = torch.load(io.BytesIO(answers[0]), weights_only=False)
    return result


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    """Until all have ended; if one fails, the others wait for it in vain and are ended."""
    waiting = list(processes)
    while waiting:
        for process in list(waiting):
            try:
                code = process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
            waiting.remove(process)
            if code:
                for other in waiting:
                    other.kill()


def _work(rank: int, size: int, folder: str, job: dict[str, Any]) -> dict[str, Any]:
    """One process: the same local steps on its part of every batch."""
    from lensemble_flwr.model.inner import inner_steps
    from lensemble_flwr.model.team import Team
    from lensemble_flwr.model.world_model import WorldModel

    torch.set_num_threads(job.pop("threads"))
    own_gpu = job["spec"].device != "cpu" and torch.cuda.device_count() >= size
    if own_gpu:
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if own_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    try:
        model = WorldModel(job.pop("model_spec"))
        model.load_state_dict(job.pop("weights"))
        result = inner_steps(model, **job, team=Team(rank, size))
        return {"result": result} if rank == 0 else {}
    finally:
        torch.distributed.destroy_process_group()


def main(arguments: list[str]) -> int:
    """A process: rank, size and folder as arguments, the job on standard input, the answer on standard output."""
    rank, size, folder = int(arguments[0]), int(arguments[1]), arguments[2]
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not reach the pipe
    try:
        job = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)  # from our own parent process
        found, code = _work(rank, size, folder, job), 0
    except LensembleError as error:
        found, code = {"error": error}, 1
    with answer:
        answer.write(_dump(found))
    return code
