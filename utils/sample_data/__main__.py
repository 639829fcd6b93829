import sys

from utils.sample_data.write import main

sys.exit(main(sys.argv[1:]))
