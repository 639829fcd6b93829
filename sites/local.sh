# shellcheck shell=bash
# A workstation, a small cluster or a test machine: no modules, no queue options. Run in the project's tests.
# Copy it to make a site file of your own, sites/mine.sh, and let that say SITE=mine. A site file is read twice:
#   - in your login shell (source sites/perlmutter.sh): it sets SITE and SBATCH_* variables, which sbatch obeys;
#   - in the job (by submit_pm.sh, which sets IN_JOB): it loads modules and sets what the tasks need. A command that
#     fails ends the job, also a last line like [ ... ] && export ...: write if, or [ ... ] || export.
# How many threads a rank has it finds out itself, unless OMP_NUM_THREADS says so.
if [ -z "$IN_JOB" ]; then
    export SITE=local
fi
