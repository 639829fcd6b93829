"""What the checkers of the exercises hold a solution against, one file an exercise, of the same name.

Each has AFTER (which part of a page to read before), MINUTES (that it takes then), DEFINES (the name by which a
solution is known), HINTS (one upon the other), SIZES where it runs on ranks, and check(path, rank, size), which raises
Wrong.
"""
