"""The Slurm script: the command lines that it starts, a signal before the time limit, and a run that goes on in the next start.

Stand-ins on ``PATH`` take the place of Slurm's commands. They write their arguments to a log.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal.tests.harness.processes import needs_own_world
from areal.tests.harness.recipes.recipe_data import recipe_model, rows

ROOT = Path(__file__).parents[4]
SCRIPT = ROOT / "tools" / "slurm" / "areal.sbatch"
JOB = 12345
RANK_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "GROUP_RANK")

NOTE = 'printf "%s\\n" "$(basename "$0") $*" >> "$SLURM_LOG"\n'
STAND_INS = {
    "scontrol": NOTE + 'if [ "$1" = show ]; then printf "%s\\n" $NODES; fi\n',
    # As slurmstepd does: the task has its own session, and its process group receives the signal.
    "srun": NOTE + 'while [[ $1 == --* ]]; do shift; done\nexec setsid "$PYTHON" "$RUN_TASK" "$@"\n',
    "scancel": NOTE + 'kill -s "${1#--signal=}" -- "-$(cat "$TASK")"\n',
}
RUN_TASK = """
import os, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell ignores it in background jobs; tasks of Slurm are no such jobs
pathlib.Path(os.environ["TASK"]).write_text(str(os.getpgid(0)))
os.execvp(*[("true", ["true"]), (sys.argv[1], sys.argv[1:])]["EXECUTE" in os.environ])
"""
UNTIL_INTERRUPT = (
    "import sys, time\ntry: print('runs', flush=True); time.sleep(60)\nexcept KeyboardInterrupt: sys.exit(1)"
)


@dataclass
class Slurm:
    """A folder with stand-ins, and the variables of a job."""

    folder: Path
    variables: dict[str, str]

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the script as the shell of a batch job."""
        environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        return subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=environment | self.variables | variables,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Return exit code and output of the script."""
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    @property
    def log(self) -> list[str]:
        """Command lines of the stand-ins, in their order."""
        return (self.folder / "log").read_text().splitlines()


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text("#!/bin/bash\n" + text)
        (commands / name).chmod(0o755)
    (tmp_path / "run_task.py").write_text(RUN_TASK)
    variables = {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "RUN_TASK": str(tmp_path / "run_task.py"),
        "TASK": str(tmp_path / "task"),
        "SLURM_LOG": str(tmp_path / "log"),
        "NODES": "localhost",
        "SLURM_JOB_ID": str(JOB),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
    }
    return Slurm(tmp_path, variables)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Return once a file has contents."""
    deadline = time.monotonic() + 120
    while not path.exists() or not path.stat().st_size:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_script_is_valid() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SCRIPT], check=True)


def test_time_between_signal_and_limit_is_what_the_script_says() -> None:
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", SCRIPT.read_text(), re.MULTILINE))
    assert options["signal"] == "B:USR1@120"
    assert {"requeue", "open-mode"} <= set(options)
    assert options["ntasks-per-node"] == "1"


def test_one_torchrun_per_node_with_the_rendezvous_on_the_first(slurm: Slurm) -> None:
    job = {
        "SLURM_JOB_NODELIST": "gpu[7-8]",
        "NODES": "gpu7 gpu8",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    assert slurm.run("grpo", "run.toml", "backend=fsdp:d16", **job) == (0, "")
    assert slurm.log == [
        "scontrol show hostnames gpu[7-8]",
        f"srun --nodes=2 --ntasks-per-node=1 --kill-on-bad-exit=0 {sys.executable} -m torch.distributed.run"
        f" --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu7:22345 --rdzv-id {JOB}-0"
        " -m areal.cli grpo run.toml backend=fsdp:d16 --resume",
    ]


def test_ranks_and_port_by_variables_and_another_rendezvous_after_a_restart(slurm: Slurm) -> None:
    variables = {"SLURM_GPUS_ON_NODE": "8", "RANKS_PER_NODE": "2", "RENDEZVOUS_PORT": "29500"}
    assert slurm.run("sft", "run.toml", SLURM_RESTART_COUNT="3", **variables)[0] == 0
    assert f"--nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:29500 --rdzv-id {JOB}-3" in slurm.log[1]


def test_script_without_arguments_explains_itself(slurm: Slurm) -> None:
    assert slurm.run() == (
        2,
        "usage: sbatch [OPTIONS] areal.sbatch sft|dpo|rm|grpo|ppo|distill CONFIG.toml [key=value ...]\n",
    )


@pytest.mark.parametrize("code", [0, 3])
def test_job_that_ends_by_itself_is_not_queued_again(slurm: Slurm, code: int) -> None:
    python = slurm.folder / "python"
    python.write_text(f"#!/bin/bash\nexit {code}\n")
    python.chmod(0o755)
    (slurm.folder / "bin" / "srun").write_text("#!/bin/bash\n" + NOTE + f"exec {python}\n")
    assert slurm.run("sft", "run.toml") == (code, "")
    assert [line.split()[0] for line in slurm.log] == ["scontrol", "srun"]


def test_signal_interrupts_the_tasks_and_queues_the_job_again(slurm: Slurm) -> None:
    task = slurm.folder / "until_interrupt.py"
    task.write_text(UNTIL_INTERRUPT)
    (slurm.folder / "bin" / "srun").write_text(
        "#!/bin/bash\n" + NOTE + f'exec setsid "$PYTHON" "$RUN_TASK" "$PYTHON" {task}\n'
    )
    process = slurm.start("sft", "run.toml", EXECUTE="1")
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, f"the time limit is near: job {JOB} is queued again\n")
    assert slurm.log[2:] == [f"scancel --signal=INT {JOB}", f"scontrol requeue {JOB}"]


# ---- real runs


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows(16))))
    text = f'model = "{recipe_model()}"\ndataset = "rows.jsonl"\noutput = "run"\ndtype = "float32"\nbatch_size = 4\n'
    (tmp_path / "run.toml").write_text(text + 'trackers = ["jsonl"]\n')
    return tmp_path / "run.toml"


@needs_own_world
def test_dry_run_on_one_node(slurm: Slurm, settings: Path) -> None:
    code, output = slurm.run("sft", str(settings), "--dry-run", EXECUTE="1")
    assert code == 0, output
    assert "[[" in output
    assert '"resume": true' in output


@needs_own_world
def test_run_ends_with_a_checkpoint_before_the_limit_and_goes_on_under_torchrun(slurm: Slurm, settings: Path) -> None:
    folder = settings.parent / "run"
    process = slurm.start("sft", str(settings), "steps=100000", EXECUTE="1")
    wait_for(folder / "metrics.jsonl", process)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    interrupted = re.search(r"interrupted after step (\d+) of 100000", output)
    assert interrupted is not None, output
    assert slurm.log[-1] == f"scontrol requeue {JOB}"
    done = int(interrupted[1])
    code, output = slurm.run("sft", str(settings), f"steps={done + 1}", EXECUTE="1", SLURM_RESTART_COUNT="1")
    assert code == 0, output
    assert f"resumed after step {done} of {done + 1}" in output
    assert f"finished {done + 1} steps" in output
