from utils.config.versions import check

check()
