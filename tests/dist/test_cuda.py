"""On a machine with a GPU: the same script in one process (with NCCL) and as two ranks that share the GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# torch.cuda.is_available() would start CUDA in this process, which then could not fork workers.
@pytest.mark.dist
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no NVIDIA GPU here")
@pytest.mark.parametrize("workers", [1, 2])
def test_sessions_work_on_a_gpu(workers):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
        str(ROOT / "tests/dist/cuda_job.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
