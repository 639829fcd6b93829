import sys

from utils.prepare_data.prepare import main

sys.exit(main(sys.argv[1:]))
