"""Exercise: choose a layout for a budget, with the planner. Fill in TODO 1 and 2; this tells what is next:

    python exercises/check.py exercises/choose_layout.py

You want to train the section `hires`: 0.25 degrees, 64,800 tokens, 30,000 iterations of 64 samples, on nodes of four
A100 with 40 GB. The training must be done in 20 hours, and your project has 3,150 GPU hours left. How many GPUs do you
ask for, and with which flags? This ranks all layouts of 64 GPUs; it takes about a minute on two cores:

    python benchmarks/plan.py --config=hires --machine perlmutter --ranks 64

Think first: from its answer, how many hours do 64 GPUs take, and how many GPU hours is that? On four times as many,
what happens to the hours and to the GPU hours if all goes well, and what keeps it from going well? How many ranks can
share 64 samples without sharing one? (Chapter 2, "Which layout?", and docs/scaling.md.)
"""

RANKS = None  # TODO 1: how many GPUs; all of a node
FLAGS = None  # TODO 2: as the planner tells them, such as ["--tensor_parallel=4", "--shard=gradients"]
