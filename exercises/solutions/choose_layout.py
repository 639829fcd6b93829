"""A solution of choose_layout.py:

python exercises/check.py exercises/solutions/choose_layout.py

64 GPUs have a sample each, and take 47 hours. Of more, some must share a sample: with cp 4 they share its tokens, in a
node, and send keys and values only. 128 GPUs are too slow, 1,024 lose too much to what they send.
"""

RANKS = 256
FLAGS = ["--context_parallel=4", "--cp_attention=ulysses", "--activation_checkpoint=none"]
