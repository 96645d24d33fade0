"""Write a model folder of a named shape with random weights, and adapters for it.

    python benchmarks/make_model.py 4m /tmp/model --adapters 8 --rank 16

This writes /tmp/model and /tmp/model-adapters/a0 … a7. Any MLX server can load them; no network is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mlx_tandem.cli.bench.shapes import SHAPES, write_adapter, write_model


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("shape", choices=[name for name, shape in SHAPES.items() if shape.parameters < 1e9])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--positions", type=int, default=8192, help="longest context")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write_model(args.folder, shape, positions=args.positions, seed=args.seed)
    print(f"{args.folder}: {shape.parameters / 1e6:.2f} M parameters")
    for i in range(args.adapters):
        folder = args.folder.with_name(args.folder.name + "-adapters") / f"a{i}"
        write_adapter(folder, shape, rank=args.rank, seed=args.seed + i + 1)
        print(folder)


if __name__ == "__main__":
    main()
