"""Rectified flow (Liu et al. 2022): straight paths from noise to data, in continuous or discrete time."""

from opensora.schedulers.rf.rectified_flow import RectifiedFlow
