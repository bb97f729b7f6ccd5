"""Tactics: fingerprints, cache layout, and which files a coming launch may use."""

import hashlib
import json
from pathlib import Path

import pytest
from lockstep_core import tactics

CASES = Path(__file__).parent / "cases" / "E_tactics.jsonl"
E8 = "e8" * 32
E10 = "10" * 32
KEY = "0.6.18/sm121/05cc0d96dc7e28b8"
ENTRY = {"('fp4_gemm', 'CudnnFp4GemmRunner', ((4, 7168), (7168, 4608)))": ["CudnnFp4GemmRunner", 3]}

ARGV = ["python3", "-m", "sglang.launch_server", "--tp", "3", "--ep-size", "1", "--speculative-dspark-block-size", "5"]
ENV = {"DSV41_WO_A_W8": "1", "NCCL_PROTO": "^LL128", "PATH": "/usr/bin"}
VERSIONS = {"image": "sha256:37939c26", "flashinfer": "0.6.18"}

# Those of the campaign's keep adapter, letter by letter.
VOLATILE = [
    "DSV41_DRAFT_CAPTURE",
    "DSV41_DRAFT_CAPTURE_OUT",
    "DSV41_DRAFT_CAPTURE_TRIGGER",
    "DSV41_VERIFY_CAP",
    "DSV41_VERIFY_CAP_MIN",
    "DSV41_DRAFT_TAU",
    "DSV41_BLOCK_VERIFY",
    "DSV41_FOLDED_FENCE",
    "DSV41_AUTOTUNE_KEEP",
    "DSV41_DRAFT_HEAD_FP8",
    "DSV41_ENGRAM_PREFETCH",
    "DSV41_ENGRAM_PREFETCH_CHECK",
    "DSV41_WO_A_W8_DRAFT",
    "SGLANG_RUN_ID",
]


def put(cache: Path, name: str, content: object, fingerprint: str | None = None, key: str = KEY) -> Path:
    """Write a cache file as the engine does, and its sidecar as the adapter does."""
    file = cache / "sglang/flashinfer/autotune" / key / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    if fingerprint:
        file.with_suffix(".launch").write_text(fingerprint + "\n")
    return file


def kept(judged):
    return {item["file"]: item["keep"] for item in judged}


class TestFingerprint:
    def test_is_the_sha256_of_what_decides(self):
        # The same bytes put together by hand.
        payload = (
            '{"argv":["python3","--tp","3"],"env":{"DSV41_WO_A_W8":"1","NCCL_PROTO":"^LL128"},"versions":{"image":"a"}}'
        )
        found = tactics.fingerprint(["python3", "--tp", "3"], ENV, {"image": "a"})
        assert found == hashlib.sha256(payload.encode()).hexdigest()

    @pytest.mark.parametrize("key", VOLATILE)
    def test_volatile_switches_share_tactics(self, key):
        assert tactics.fingerprint(ARGV, {**ENV, key: "1"}, VERSIONS) == tactics.fingerprint(ARGV, ENV, VERSIONS)

    @pytest.mark.parametrize(
        "key", ["SGLANG_DSPARK_FOLDED_SAMPLING", "DSV41_WO_A_W8_MID", "SPARK_X", "B12X_Y", "NCCL_BUFFSIZE"]
    )
    def test_every_family_of_switches_counts(self, key):
        assert tactics.fingerprint(ARGV, {**ENV, key: "1"}, VERSIONS) != tactics.fingerprint(ARGV, ENV, VERSIONS)

    def test_unset_is_not_empty(self):
        folded = {"SGLANG_DSPARK_FOLDED_SAMPLING": ""}
        assert tactics.fingerprint(ARGV, {**ENV, **folded}, VERSIONS) != tactics.fingerprint(ARGV, ENV, VERSIONS)

    def test_keys_of_other_families_do_not_count(self):
        assert tactics.fingerprint(ARGV, {**ENV, "PORT": "1"}, VERSIONS) == tactics.fingerprint(ARGV, ENV, VERSIONS)

    def test_ranks_of_one_launch_agree(self):
        head = [
            *ARGV,
            "--node-rank",
            "0",
            "--host",
            "10.77.0.11",
            "--port=8888",
            "--mem-fraction-static",
            "0.94",
            "--x",
        ]
        worker = [*ARGV, "--node-rank", "2", "--mem-fraction-static=0.95", "--dist-init-addr", "10.0.23.1:20000", "--x"]
        at_head = tactics.fingerprint(head, {**ENV, "NCCL_IB_HCA": "rocep1s0f0"}, VERSIONS)
        at_worker = tactics.fingerprint(worker, {**ENV, "NCCL_SOCKET_IFNAME": "eth1"}, VERSIONS)
        assert at_head == at_worker
        assert at_head == tactics.fingerprint([*ARGV, "--x"], ENV, VERSIONS)

    @pytest.mark.parametrize(
        ("argv", "versions"),
        [
            ([*ARGV[:-1], "3"], VERSIONS),  # E10: block 3 over E8's block 5, the same engine key
            (ARGV, {**VERSIONS, "flashinfer": "0.6.19"}),
            (ARGV, {**VERSIONS, "image": "sha256:381b27ff"}),
        ],
    )
    def test_block_size_and_versions_count(self, argv, versions):
        assert tactics.fingerprint(argv, ENV, versions) != tactics.fingerprint(ARGV, ENV, VERSIONS)


class TestLayout:
    def test_a_cache_file_of_the_fleet(self):
        assert tactics.parse_path("0.6.18/sm121/05cc0d96dc7e28b8/rank_tp2_pp0_dp0.json") == {
            "version": "0.6.18",
            "arch": "sm121",
            "key": "0.6.18/sm121/05cc0d96dc7e28b8",
            "stem": "0.6.18/sm121/05cc0d96dc7e28b8/rank_tp2_pp0_dp0",
            "tp": 2,
            "pp": 0,
            "dp": 0,
            "kind": "cache",
        }

    @pytest.mark.parametrize("name", ["rank_tp0_pp0_dp0.launch", "rank_tp0_pp0_dp0.json.launch"])
    def test_both_spellings_of_a_sidecar(self, name):
        place = tactics.parse_path(f"{KEY}/{name}")
        assert place is not None
        assert (place["kind"], place["stem"]) == ("sidecar", f"{KEY}/rank_tp0_pp0_dp0")

    @pytest.mark.parametrize(
        "path",
        [
            f"{KEY}/rank_tp0_pp0_dp0.json.tmp",
            f"{KEY}/notes.json",
            f"{KEY}/rank_tpX_pp0_dp0.json",
            "0.6.18/sm121/rank_tp0_pp0_dp0.json",
            f"deeper/{KEY}/rank_tp0_pp0_dp0.json",
            f"{KEY}/rank_tp0_pp0_dp0.json\n",
        ],
    )
    def test_anything_else_is_not_ours(self, path):
        assert tactics.parse_path(path) is None

    def test_sidecar_name(self):
        assert tactics.sidecar_name(f"{KEY}/rank_tp1_pp0_dp0.json") == f"{KEY}/rank_tp1_pp0_dp0.launch"


class TestInspect:
    """E04: what FlashInfer makes of a cache file."""

    @pytest.fixture
    def case(self):
        return json.loads(CASES.read_text().splitlines()[0])

    def test_handed_case(self, case):
        seen = tactics.inspect(case["input"]["rank_tp0_pp0_dp0.json"], case["input"]["current_env"])
        assert seen["entries"] == case["expected"]["entries"]
        assert seen["loadable"] is case["expected"]["loadable"]
        assert seen["reason"].startswith("_metadata differs")
        assert "entire file is skipped" in seen["reason"]
        assert "'0.6.3', here '0.6.18'" in seen["reason"]
        assert "'NVIDIA B200', here 'NVIDIA GB10'" in seen["reason"]
        assert list(tactics.NOT_ENTRIES) == case["expected"]["keys_not_entries"]
        assert case["expected"]["tactic_may_be_list"]  # the handed file has [8, 34], and both entries count

    def test_the_machine_it_was_tuned_on_loads_it(self, case):
        content = case["input"]["rank_tp0_pp0_dp0.json"]
        seen = tactics.inspect(content, {"flashinfer_version": "0.6.3", "gpu": "NVIDIA B200", "cuda_version": "13.0"})
        assert (seen["loadable"], seen["reason"]) == (True, None)

    def test_last_updated_by_is_no_entry(self):
        assert tactics.inspect({"_metadata": {}, "_last_updated_by": {}, **ENTRY})["entries"] == 1

    def test_older_names_mean_the_same(self):
        content = {"_metadata": {"gpu_name": "NVIDIA GB10", "cudnn_version": "9.19.0"}, **ENTRY}
        assert tactics.inspect(content, {"gpu": "NVIDIA GB10", "cudnn_version": "91900"})["loadable"]
        assert not tactics.inspect(content, {"gpu": "NVIDIA B200"})["loadable"]
        assert not tactics.inspect(content, {"cudnn_version": "90800"})["loadable"]

    def test_cudnn_8(self):
        content = {"_metadata": {"cudnn_version": "8907"}}
        assert tactics.inspect(content, {"cudnn_version": "8.9.7"})["loadable"]
        assert not tactics.inspect(content, {"cudnn_version": "8.9"})["loadable"]

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (ENTRY, "no _metadata"),
            ({"_metadata": {"gpu": "NVIDIA GB10"}, **ENTRY}, "flashinfer_version None, here '0.6.18'"),
            ([], "not a JSON object"),
            ({"_metadata": {"flashinfer_version": "0.6.18"}, "('op',)": ["Runner"]}, "not [runner, tactic]"),
            ({"_metadata": {"flashinfer_version": "0.6.18"}, "('op',)": ["Runner", "3"]}, "not [runner, tactic]"),
        ],
    )
    def test_what_cannot_be_trusted(self, content, reason):
        seen = tactics.inspect(content, {"flashinfer_version": "0.6.18"})
        assert seen["loadable"] is False
        assert reason in seen["reason"]

    def test_nothing_known_of_the_machine_compares_nothing(self):
        assert tactics.inspect(ENTRY)["loadable"]


class TestScanAndJudge:
    def test_missing_cache_is_empty(self, tmp_path):
        assert tactics.scan(str(tmp_path / "none")) == []

    def test_scan_reads_what_lies_there(self, tmp_path):
        file = put(tmp_path, "rank_tp1_pp0_dp0.json", {"_metadata": {"gpu": "NVIDIA GB10"}, **ENTRY}, E8)
        put(tmp_path, "rank_tp1_pp0_dp0.json.tmp", "x")
        assert tactics.scan(str(tmp_path)) == [
            {
                "file": f"{KEY}/rank_tp1_pp0_dp0.json",
                "sidecar": f"{KEY}/rank_tp1_pp0_dp0.launch",
                "fingerprint": E8,
                "key": KEY,
                "version": "0.6.18",
                "arch": "sm121",
                "tp": 1,
                "pp": 0,
                "dp": 0,
                "bytes": file.stat().st_size,
                "mtime_ns": file.stat().st_mtime_ns,
                "entries": 1,
                "metadata": {"gpu": "NVIDIA GB10"},
                "problem": None,
            }
        ]

    def test_only_the_matching_file_stays(self, tmp_path):
        good = put(tmp_path, "rank_tp0_pp0_dp0.json", ENTRY, E8)
        put(tmp_path, "rank_tp0_pp0_dp0.json", ENTRY, E10, key="0.6.18/sm121/085bb8a93fd1bc79")
        put(tmp_path, "rank_tp0_pp0_dp0.json", ENTRY, None, key="0.6.18/sm121/aaaaaaaaaaaaaaaa")
        put(tmp_path, "rank_tp0_pp0_dp0.json", '{"half', E8, key="0.6.18/sm121/bbbbbbbbbbbbbbbb")
        put(tmp_path, "rank_tp2_pp0_dp0.json", ENTRY, E8, key="0.6.18/sm121/cccccccccccccccc")
        orphan = put(tmp_path, "rank_tp0_pp0_dp0.json", ENTRY, E8, key="0.6.18/sm121/dddddddddddddddd")
        orphan.unlink()
        judged = tactics.judge(tactics.scan(str(tmp_path)), E8, rank=0)
        why = {item["key"].rsplit("/", 1)[1]: item["why"] for item in judged}
        assert why == {
            "05cc0d96dc7e28b8": None,
            "085bb8a93fd1bc79": "tuned by launch 101010101010, the coming one is e8e8e8e8e8e8",
            "aaaaaaaaaaaaaaaa": "no sidecar says which launch tuned it",
            "bbbbbbbbbbbbbbbb": "not a JSON object",
            "cccccccccccccccc": "tuned by rank 2, this is rank 0",
            "dddddddddddddddd": "a sidecar without its cache file",
        }
        assert [item["file"] for item in judged if item["keep"]] == [f"{KEY}/{good.name}"]

    def test_another_machines_file_goes_although_the_sidecar_matches(self, tmp_path):
        put(tmp_path, "rank_tp0_pp0_dp0.json", {"_metadata": {"gpu": "NVIDIA B200"}, **ENTRY}, E8)
        listing = tactics.scan(str(tmp_path))
        assert kept(tactics.judge(listing, E8)) == {f"{KEY}/rank_tp0_pp0_dp0.json": True}
        assert kept(tactics.judge(listing, E8, {"gpu": "NVIDIA GB10"})) == {f"{KEY}/rank_tp0_pp0_dp0.json": False}


class TestVerdict:
    @staticmethod
    def rank(tmp_path: Path, rank: int, fingerprints: dict[str, str]):
        for key, fingerprint in fingerprints.items():
            put(tmp_path / str(rank), f"rank_tp{rank}_pp0_dp0.json", ENTRY, fingerprint, key=f"0.6.18/sm121/{key}")
        return tactics.judge(tactics.scan(str(tmp_path / str(rank))), E8, rank=rank)

    def test_all_match(self, tmp_path):
        ranks = {f"spark{r + 1}": self.rank(tmp_path, r, {"a" * 16: E8, "b" * 16: E8}) for r in range(3)}
        verdict = tactics.verdict(ranks)
        assert (verdict["match"], verdict["reuse"], verdict["why"]) == (True, True, [])
        assert verdict["keys"] == ["0.6.18/sm121/" + "a" * 16, "0.6.18/sm121/" + "b" * 16]

    def test_one_rank_with_another_launchs_file_spoils_it_for_all(self, tmp_path):
        ranks = {
            "spark1": self.rank(tmp_path, 0, {"a" * 16: E8}),
            "spark2": self.rank(tmp_path, 1, {"a" * 16: E8}),
            "spark3": self.rank(tmp_path, 2, {"a" * 16: E10}),
        }
        verdict = tactics.verdict(ranks)
        assert (verdict["match"], verdict["reuse"], verdict["keys"]) == (False, False, [])
        assert verdict["why"] == ["spark3 has no matching file for 0.6.18/sm121/" + "a" * 16]

    def test_a_missing_draft_file_on_one_rank_spoils_it_too(self, tmp_path):
        ranks = {
            "spark1": self.rank(tmp_path, 0, {"a" * 16: E8, "b" * 16: E8}),
            "spark2": self.rank(tmp_path, 1, {"a" * 16: E8}),
        }
        assert tactics.verdict(ranks)["match"] is False

    def test_nothing_anywhere_agrees_and_reuses_nothing(self, tmp_path):
        ranks = {"spark1": self.rank(tmp_path, 0, {}), "spark2": self.rank(tmp_path, 1, {"a" * 16: E10})}
        verdict = tactics.verdict(ranks)
        assert (verdict["match"], verdict["reuse"], verdict["keys"]) == (True, False, [])


def test_nesting_without_end_spoils_one_file_and_no_scan(tmp_path):
    put(tmp_path, "rank_tp0_pp0_dp0.json", "[" * 100_000)
    put(tmp_path, "rank_tp1_pp0_dp0.json", {"a": ["r", 1]})
    assert [item["problem"] for item in tactics.scan(str(tmp_path))] == ["not a JSON object", None]
    deep: list = [1]
    for _ in range(5000):
        deep = [deep]
    assert tactics.inspect({"a": ["r", deep]})["reason"] is None
