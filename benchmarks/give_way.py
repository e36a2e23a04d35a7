#!/usr/bin/env python3
"""How much longer do others wait beside a run that gives way, and what does it train meanwhile?"""

import sys
from pathlib import Path

from evidence.result import Column, Figure, Result, Table, Target
from evidence.show import about, numbers, options, present

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from simulation import busy_cluster as busy

parser = options(__doc__, repeats=3)
parser.add_argument("--sizes", type=numbers, default=[16, 64, 1024], help="nodes: 16,64")
given, tables, met = parser.parse_args(), list[Table](), list[Target]()
columns = (Column(""), *(Column(name, form) for name, form in busy.FIGURES.items()))
for size, load in ((size, load) for size in given.sizes for load in (0.7, 0.9, 1.1)):
    days, where = given.repeats if size <= 100 else 1, f"{size} nodes, load {load:.0%}"
    found = busy.measure(size, load, days, 12.0)
    rows = tuple((busy.CONTESTANTS[name], *map(Figure, row)) for name, row in found.items())
    tables.append(Table(where, columns, rows))
    for name, at, aim in busy.AIMS:
        met.append(Target(f"{where}, {name}: {columns[at + 1].name}", aim, found[name][at]))
present(Result(about("A run that gives way, in virtual time"), tuple(tables), tuple(met)), given)
