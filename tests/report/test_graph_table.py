"""The layer table, spelled out."""

from __future__ import annotations

from heterps_compile.cluster import Cluster
from heterps_compile.graph import Layer, LayerGraph
from heterps_compile.report.graph_table import human, layer_table

FLEET = Cluster.from_dict(
    {
        "resources": [
            {"name": "cpu", "price_usd_per_h": 0.04, "limit": 4, "flops_per_s": 4e10, "memory_bytes_per_s": 1e10},
            {"name": "odd", "device": "cuda", "price_usd_per_h": 1, "limit": 1},
        ]
    }
)
GRAPH = LayerGraph(
    layers=(
        Layer(name="emb", kind="embedding", nodes=("e",), parameter_bytes=1_500_000, touched_bytes_per_sample=64,
              forward_flops_per_sample=16, forward_bytes_per_sample=160),
        Layer(name="top", kind="linear", nodes=("t",), parameter_bytes=4096, touched_bytes_per_sample=16,
              forward_flops_per_sample=800, backward_flops_per_sample=1600, forward_bytes_per_sample=240),
    )
)  # fmt: skip


def test_table_of_two_layers() -> None:
    assert layer_table(GRAPH, FLEET).splitlines() == [
        "layer  kind       params  touched/sample  FLOP/sample  FLOP/byte  on cpu (4 FLOP/byte)  on odd (0 FLOP/byte)",
        "emb    embedding  1.5 MB            64 B           16       0.10  data-intensive        unknown",
        "top    linear     4.1 kB            16 B        2.4 k      10.00  compute-intensive     unknown",
        "2 layers, 1.5 MB of parameters, 2.42 kFLOP per sample",
    ]


def test_numbers_people_read() -> None:
    assert [human(value, "B") for value in (0, 999, 1536, 2.5e9)] == ["0 B", "999 B", "1.54 kB", "2.5 GB"]
    assert human(12_345) == "12.3 k"
