"""Plan a DLRM for a fleet of three resource types, none of which need be here.

    python examples/plan_fleet.py [samples per second]

Prints which layers go where, how many of each type to rent, what that costs and what it would have cost otherwise.
"""

import sys

import torch

import heterps_compile
from heterps_compile.models import DLRM, NUM_DENSE, NUM_TABLES

ROWS = 200_000
BATCH_SIZE = 4096
FLEET = {
    "version": 1,
    "resources": [  # rates and memory of these names come from the catalog
        {"name": "cpu", "price_usd_per_h": 0.04, "limit": 32},  # one unit is a core
        {"name": "v100", "price_usd_per_h": 2.42, "limit": 32},
        {"name": "a100-40", "price_usd_per_h": 4.10, "limit": 16},
    ],
    "links": [
        {"between": ["cpu", "v100"], "bandwidth_bytes_per_s": 1.25e10, "latency_s": 2e-5},
        {"between": ["cpu", "a100-40"], "bandwidth_bytes_per_s": 1.25e10, "latency_s": 2e-5},
    ],
}

min_throughput = float(sys.argv[1]) if len(sys.argv) > 1 else 500_000
model = DLRM((ROWS,) * NUM_TABLES, dim=16, sparse=True)
example_inputs = (torch.rand(BATCH_SIZE, NUM_DENSE), torch.randint(ROWS, (BATCH_SIZE, NUM_TABLES)))

plan = heterps_compile.plan(model, example_inputs, cluster=FLEET, min_throughput=min_throughput, profile="estimate")
print(plan.explain())
sys.exit(0 if plan.feasible else 1)
