"""sglang's function, called under its own name, done by specstate: what a server with SPECSTATE_SGLANG=1 does at its start.

Needs sglang. The arrays of this example are NumPy's, so that it runs without a GPU.
"""

import logging
import sys

try:
    import numpy as np
except ModuleNotFoundError:
    sys.exit("sglang_drop_in.py: needs numpy, which is not installed in this Python")

import specstate

logging.basicConfig(format="%(message)s")
logging.getLogger("specstate.sglang").setLevel(logging.INFO)


def main():
    try:
        specstate.sglang.install(only="hisparse")
    except ImportError as error:
        sys.exit(f"sglang_drop_in.py: {error}")
    from sglang.kernels.ops.kvcache.hisparse import copy_cache_planned_mla

    host, device = np.arange(64, dtype=np.uint8).reshape(4, 16), np.zeros((4, 16), np.uint8)
    copy_cache_planned_mla(
        miss_src=np.array([[3, 1]]), miss_dst=np.array([[0, 2]], np.int32), miss_count=np.array([2], np.int32),
        num_real_reqs=np.array([1], np.int32), host_cache=host, device_buffer=device, item_size_bytes=16,
    )  # fmt: skip
    print("rows that arrived:", device[:, 0].tolist())
    specstate.sglang.uninstall()


if __name__ == "__main__":
    main()
