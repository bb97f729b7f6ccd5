"""hostmem: GB10's answers, of which half are "not applicable", and the kernel's files."""

from pathlib import Path

import pytest
from handed import cases, hold
from lockstep_core import hostmem

CASES = cases("F")

# What a guard might use: GiB, GiB, percent.
LIMITS = {"warn_gib": 6.0, "floor_gib": 0.75, "full_avg10": 20.0}


class TestHanded:
    def test_f01_csv(self):
        (gpu,) = hostmem.nvidia_smi_csv(CASES["F01"]["input"])
        hold(CASES["F01"], gpu)

    def test_f02_two_netdevs_a_port(self):
        fabric = hostmem.ibdev2netdev(CASES["F02"]["input"])
        got = {
            "up": fabric["up"],
            "physical_ports_up": fabric["physical_ports_up"],
            "cables": fabric["physical_ports_up"],
        }
        hold(CASES["F02"], got, prose={"case_sensitive"})
        assert len({link["netdev"] for link in fabric["links"]}) == 4

    def test_f03_serving_host(self):
        head, worker = (hostmem.memory(CASES["F03"]["input"][host]) for host in ("head", "worker"))
        pressure = hostmem.psi(CASES["F04"]["input"]["normal"])
        verdict = hostmem.pressure_verdict(head["available_gib"], pressure, **LIMITS)
        totals = {hostmem.meminfo(CASES["F03"]["input"][host])["MemTotal"] for host in ("head", "worker")}
        got = {
            "head_available_gib": head["available_gib"],
            "head_available_pct": head["available_pct"],
            "swap_used_gib": head["swap_used_gib"],
            "verdict": f"serving normally: {verdict['verdict']}, not kill",
            "memtotal_not_identical_between_nodes": len(totals) == 2,
        }
        hold(CASES["F03"], got, prose={"units"})
        assert hostmem.pressure_verdict(worker["available_gib"], None, **LIMITS)["verdict"] == "warn"

    def test_f04_pressure(self):
        given = CASES["F04"]["input"]
        expected = CASES["F04"]["expected"]
        normal = hostmem.psi(given["normal"])
        assert {field: normal[field] for field in expected["normal"]} == expected["normal"]

        def fails():
            raise OSError(95, "Operation not supported")

        def missing():
            raise FileNotFoundError(2, "No such file or directory")

        for read in (fails, missing, lambda: given["open_ok_read_fails"], lambda: given["missing"]):
            reading = hostmem.read_psi(read)
            assert reading["psi"] is None, "unknown is not 0.00"
            assert reading["source"] == "MemAvailable"
            assert reading["why"]
        assert hostmem.read_psi(lambda: given["normal"]) == {"psi": normal, "source": "psi", "why": None}
        assert set(expected) == {"normal", "read_fails", "missing", "total_unit", "better_signal"}
        # 0.5 s of stall in 2 s, from microseconds.
        later = {**normal, "some_total_us": normal["some_total_us"] + 500_000}
        assert hostmem.stalled_share(normal, later, 2.0) == 0.25

    def test_f53_table_and_processes(self):
        given, expected = CASES["F53"]["input"], CASES["F53"]["expected"]
        (gpu,) = hostmem.nvidia_smi_table(given["header_row"] + "\n" + given["table_row"])
        (app,) = hostmem.compute_apps_csv(given["compute_apps_csv"])
        got = {
            "memory": gpu["memory"],
            "bus_id": gpu["bus_id"],
            "process_used_mib": app["used_mib"],
            "ecc": gpu["ecc"],
        }
        assert got == {field: expected[field] for field in got}
        assert set(expected) - set(got) == {"sum_of_processes_is_not_total_used", "drained"}
        assert (gpu["fan_pct"], gpu["temp_c"], gpu["power_w"], gpu["power_cap_w"], gpu["util_pct"]) == (
            None,
            41,
            11,
            None,
            0,
        )
        assert not hostmem.drained([app], {114687})
        assert hostmem.drained([{**app, "pid": 2000, "name": "/usr/lib/xorg/Xorg"}], {114687})

    def test_every_case_is_here(self):
        assert {name[5:8].upper() for name in dir(TestHanded) if name.startswith("test_f")} == set(CASES)


def test_csv_without_header_and_units():
    fields = ["memory.total", "memory.used", "utilization.gpu"]
    assert hostmem.nvidia_smi_csv("[N/A], [N/A], 0\n", fields) == [
        {"memory_total": None, "memory_used": None, "util_pct": 0, "memory_source": "/proc/meminfo"}
    ]


@pytest.mark.parametrize(
    "value", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "ERR!"]
)
def test_what_is_no_value_is_unknown(value):
    (gpu,) = hostmem.nvidia_smi_csv(f"memory.used [MiB], utilization.gpu [%]\n{value}, 3 %")
    assert (gpu["memory_used"], gpu["util_pct"]) == (None, 3)


def test_words_in_place_of_memory_are_no_memory():
    (gpu,) = hostmem.nvidia_smi_csv("memory.total [MiB]\nInsufficient Permissions\n")
    assert gpu["memory_source"] == "/proc/meminfo"


def test_pressure_that_is_no_number_is_unknown():
    assert hostmem.psi("full avg10=1.2.3 avg60=nan avg300=0.5 total=1.5\r\n") == {"full_avg300": 0.5}


def test_csv_of_a_gpu_that_has_memory_of_its_own():
    text = "name, memory.total [MiB], memory.used [MiB], power.draw [W]\nNVIDIA H200, 143771 MiB, 1 MiB, 76.43 W\n"
    assert hostmem.nvidia_smi_csv(text) == [
        {
            "name": "NVIDIA H200",
            "memory_total": 143771,
            "memory_used": 1,
            "power_w": 76.43,
            "memory_source": "nvidia-smi",
        }
    ]
    assert hostmem.nvidia_smi_csv("") == []


def test_table_of_a_gpu_that_has_memory_of_its_own():
    text = (
        "|   0  NVIDIA H200                    On  |   00000000:1B:00.0 Off |                    0 |\n"
        "| N/A   28C    P0             76W /  700W |       1MiB / 143771MiB |      0%      Default |\n"
    )
    (gpu,) = hostmem.nvidia_smi_table(text)
    assert gpu["memory"] == {"used_mib": 1, "total_mib": 143771}
    assert (gpu["name"], gpu["ecc"], gpu["power_cap_w"], gpu["bus_id"]) == ("NVIDIA H200", 0, 700, "00000000:1B:00.0")


def test_a_row_alone():
    (gpu,) = hostmem.nvidia_smi_table(CASES["F53"]["input"]["table_row"])
    assert gpu["memory"] is None
    assert gpu["temp_c"] == 41


def test_compute_apps_with_header_and_a_comma_in_the_name():
    text = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 42, python, -m, x, [N/A]\nGPU-1, 43, a, 7 MiB\n"
    assert hostmem.compute_apps_csv(text) == [
        {"gpu_uuid": "GPU-1", "pid": 42, "name": "python, -m, x", "used_mib": None},
        {"gpu_uuid": "GPU-1", "pid": 43, "name": "a", "used_mib": 7},
    ]


def test_triangle_has_two_cables_a_host():
    text = CASES["F02"]["input"].replace("Down", "Up")
    assert hostmem.ibdev2netdev(text)["physical_ports_up"] == 2
    assert len(hostmem.ibdev2netdev(text)["up"]) == 4


@pytest.mark.parametrize(
    ("available", "full", "verdict"),
    [
        (90.0, 0.0, "ok"),
        (2.0, 1.3, "warn"),
        (2.0, 35.0, "kill"),
        (0.5, None, "kill"),
        (30.0, 60.0, "ok"),
        (None, 0.0, "unknown"),
    ],
)
def test_pressure_verdict(available, full, verdict):
    numbers = None if full is None else {"full_avg10": full}
    assert hostmem.pressure_verdict(available, numbers, **LIMITS)["verdict"] == verdict


def test_memory_that_lacks_a_line_is_unknown():
    assert hostmem.memory("MemTotal: 1048576 kB\n") == {
        "total_gib": 1.0,
        "available_gib": None,
        "available_pct": None,
        "swap_used_gib": None,
        "cached_gib": None,
    }


def test_buddyinfo():
    text = "Node 0, zone      DMA      1      0      2      0\nNode 1, zone   Normal      0      0      0      0\n"
    assert hostmem.buddyinfo(text) == [
        {"node": 0, "zone": "DMA", "free_blocks": [1, 0, 2, 0], "free_bytes": 4096 + 2 * 4 * 4096, "largest_order": 2},
        {"node": 1, "zone": "Normal", "free_blocks": [0, 0, 0, 0], "free_bytes": 0, "largest_order": None},
    ]


def test_this_machine():
    here = Path("/proc")
    free = hostmem.memory((here / "meminfo").read_text())
    assert 0 < free["available_gib"] <= free["total_gib"]
    pages = sum(zone["free_bytes"] for zone in hostmem.buddyinfo((here / "buddyinfo").read_text()))
    assert 0 < pages <= free["total_gib"] * 2**30 * 1.01
