"""DPM-Solver and DPM-Solver++ (Lu et al. 2022): samples of models that IDDPM trained, in some 20 steps."""

from opensora.schedulers.dpms.dpm_solver import DPMSolver
