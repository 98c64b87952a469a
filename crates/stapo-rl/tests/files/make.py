"""Writes the Parquet files of this folder: `python make.py`, with pyarrow 26.0.1 and polars 2.1.0."""

import polars
import pyarrow
import pyarrow.parquet

N = 300
rows = {
    "prompt": [[{"role": "user", "content": f"problem {i}"}] for i in range(N)],
    "reward_model": [{"ground_truth": str(i)} for i in range(N)],
    # Long and repeated, so that every codec has something to compress.
    "note": [f"the same words again and again {i % 7} " * 4 for i in range(N)],
}
table = pyarrow.table(rows)
for codec in ["zstd", "gzip", "lz4", "snappy", "brotli"]:
    pyarrow.parquet.write_table(table, f"{codec}.parquet", compression=codec, row_group_size=200)
pyarrow.parquet.write_table(
    table, "zstd_v2.parquet", compression="zstd", data_page_version="2.0", use_dictionary=False
)
polars.DataFrame(rows).write_parquet("polars.parquet")
