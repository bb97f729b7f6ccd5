"""`python3 -m lockstep_sim <SGLang's arguments>`: one rank of the simulated engine, from its first line to its last."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from argparse import Namespace
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

from sglang.srt import runtime_context
from sglang.srt.managers import scheduler
from sglang.srt.model_executor.runner import flashinfer_autotune

from lockstep_sim import arguments, faults, logs, server
from lockstep_sim.generation import Generator
from lockstep_sim.group import Group

serving = logging.getLogger(logs.SERVING)
logger = logging.getLogger("sglang.srt.managers.scheduler")

PAGE = 256
# A boot of the real fleet (TP3, 0.95): these figures only fill the lines.
BYTES_PER_TOKEN, AVAILABLE_GB, SWA_FIXED_GB = 1670.75, 8.84, 0.30


def end(code: int) -> NoReturn:
    """Ends the process whatever its threads do, with all lines out."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


def crash(message: str) -> NoReturn:
    """Ends as the engine does when its scheduler fails: the traceback, then the parent's line."""
    kind = message.partition(":")[0]
    place = '  File "scheduler.py", line 1, in run_scheduler_process'
    logger.error(
        "Scheduler hit an exception: Traceback (most recent call last):\n%s\n    raise %s\n%s\n", place, kind, message
    )
    serving.error("SIGQUIT received. signum=None, frame=None. It usually means one child failed.")
    end(1)


class Rank:
    """One rank's life."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.faults = args, faults.read()
        self.rank, self.size = args.node_rank, args.tp_size
        self.state = server.State(args, crash)
        self.group: Group | None = None

    def maybe_die(self, moment: str) -> None:
        order = self.faults.get("die") or {}
        if order.get("rank") == self.rank and order.get("from", "start") == moment:
            timer = threading.Timer(float(order.get("after_s", 0)), end, args=(137,))
            timer.daemon = True
            timer.start()

    def maybe_hang(self, moment: str) -> None:
        while self.faults.get("hang") == moment:
            time.sleep(1)

    def lost(self, rank: int, address: str) -> None:
        if faults.read().get("deaf"):
            return
        if not self.state.draining:
            crash(f"RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [{address}]")
        end(1)

    def boot(self) -> None:
        """From the first line to the last before serving."""
        args = self.args
        serving.info("This is the lockstep simulator, not SGLang: no model, and no figure below means anything.")
        serving.info("server_args=%s", vars(args))
        self.maybe_die("start")
        if self.rank == 0:
            self.listen(server.HeadHandler)
        self.sabotage_shards()
        runtime_context.publish(SimpleNamespace(**vars(args)))
        scheduler.configure_scheduler_process(SimpleNamespace(**vars(args)), 0)
        logger.info("Init parallel begin.")
        begun = time.monotonic()
        try:
            self.group = Group(
                self.rank, self.size, args.dist_init_addr or "127.0.0.1:0", timeout=args.dist_timeout, lost=self.lost
            )
        except (TimeoutError, RuntimeError, OSError) as error:
            crash(f"torch.distributed.DistStoreError: {error}")
        logger.info("Init parallel ends. elapsed=%.2f s", time.monotonic() - begun)
        pool = self.load()
        self.tune()
        self.maybe_hang("warmup")
        self.group.all_gather("ready")
        if self.rank == 0:
            logger.info(
                "max_total_num_tokens=%d, chunked_prefill_size=%d, max_prefill_tokens=%d, max_running_requests=%d, "
                "context_len=%d, available_gpu_mem=7.68 GB",
                pool,
                args.chunked_prefill_size,
                args.max_prefill_tokens,
                args.max_running_requests,
                args.context_length,
            )
            serving.info("INFO:     Started server process [%d]", os.getpid())
            serving.info("INFO:     Application startup complete.")
            self.state.generator = Generator(args, pool)
            self.state.ready = True
            serving.info("The server is fired up and ready to roll!")
        else:
            self.state.ready = True
            self.listen(server.WorkerHandler)
            serving.info(
                "Dummy health check server started in background thread at %s:%d", self.args.host, self.args.port
            )
        self.maybe_die("ready")

    def listen(self, handler: type[Any]) -> None:
        try:
            server.start(self.state, handler)
        except OSError as error:
            address = f"('{self.args.host}', {self.args.port})"
            serving.error(
                "ERROR:    [Errno %s] error while attempting to bind on address %s: %s",
                error.errno,
                address,
                error.strerror,
            )
            end(1)

    def sabotage_shards(self) -> None:
        """Fault packed_false: this rank's store is shown an empty folder, and says what it finds there."""
        if self.rank in self.faults.get("packed_false", []):
            os.environ["DSV41_PACKED_DIR"] = tempfile.mkdtemp(prefix="sim-no-shards-")

    def load(self) -> int:
        """The loading and pool lines. Returns the pool in tokens."""
        args = self.args
        logger.info("Load weight begin. avail mem=111.47 GB")
        begun = time.monotonic()
        self.maybe_hang("load")
        time.sleep(float(self.faults.get("load_s", 0.1)))
        if self.faults.get("oom") is True:
            crash(server.OUT_OF_MEMORY)
        if self.faults.get("kv"):
            fraction = args.mem_fraction_static
            crash(
                "ValueError: Loaded weights leave no GPU memory for the KV cache under "
                f"--mem-fraction-static={fraction}. Raise --mem-fraction-static above {fraction + 0.001:.3f} "
                f"(minimum viable = 1 - available/pre = {fraction + 0.0003:.4f})."
            )
        logger.info(
            "Load weight end. elapsed=%.2f s, type=DeepseekV4ForCausalLM, avail mem=17.47 GB, mem usage=94.00 GB.",
            time.monotonic() - begun,
        )
        full = int((AVAILABLE_GB - SWA_FIXED_GB) * 2**30 / BYTES_PER_TOKEN) // PAGE * PAGE
        logger.info(
            "DSV4 memory calculation: bytes_per_full_token=%.2f, available_bytes=%.2f GB, c128_state_fixed=0.00 GB, "
            "swa_fixed=%.2f GB, full_token=%d", BYTES_PER_TOKEN, AVAILABLE_GB, SWA_FIXED_GB, full,
        )  # fmt: skip
        pin = (args.max_total_tokens or full) // PAGE * PAGE
        pool = full
        for pool in dict.fromkeys((full, min(full, pin))):
            sizes = f"c4={pool // 4}, c128={pool // 128}, c4_state=1664, c128_state=0"
            logger.info("DSV4 pool sizes: full=%d, swa=13312, %s", pool, sizes)
        return pool

    def tune(self) -> None:
        """The tactics of the target and, with speculation, of the draft: real files in the cache directory."""
        for draft in [False, True] if self.args.speculative_algorithm else [False]:
            runner = SimpleNamespace(
                model_path=self.args.model_path, tp_size=self.size, tp_rank=self.rank, moe_ep_size=self.args.ep_size,
                is_draft_worker=draft, tp_group=self.group, tactics_diverge=bool(self.faults.get("tactics_diverge")),
            )  # fmt: skip
            with flashinfer_autotune.flashinfer_autotune_context(runner, run_lm_head=True):
                self.maybe_hang("tune")
                time.sleep(0.05)

    def terminate(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM: rank 0 drains and stops all; a worker waits for rank 0, as in the engine."""
        if self.rank and self.state.ready:
            serving.warning(
                "SIGTERM received on node_rank %d; waiting for the rank-0 ShutdownReq broadcast.", self.rank
            )
            return
        serving.warning("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
        threading.Thread(target=self.drain).start()

    def drain(self) -> None:
        self.state.draining = True
        time.sleep(float(faults.read().get("slow_drain_s", 0)))
        while self.state.busy:
            time.sleep(0.05)
        if self.group:
            self.group.close()
        end(0)

    def serve(self) -> None:
        """Until SIGTERM, or until rank 0 says stop."""
        assert self.group is not None
        # A signal that comes just before a wait without limit would not be seen before that wait ends.
        while not self.group.shutdown.wait(0.1):
            pass
        end(0)


def main() -> None:
    args = arguments.parse(sys.argv[1:])
    logs.configure(args.log_level)
    rank = Rank(args)
    signal.signal(signal.SIGTERM, rank.terminate)
    try:
        rank.boot()
    except Exception as error:  # noqa: BLE001 - the engine's scheduler too says whatever it was, and ends
        crash(f"{type(error).__name__}: {error}")
    rank.serve()


if __name__ == "__main__":
    main()
