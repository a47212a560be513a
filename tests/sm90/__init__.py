"""Runs a kernel's PTX on a CPU: the instructions of sm_90a that Mosaic GPU kernels are made of.

Where the Pallas interpreter runs a kernel's jaxpr, this runs what the compiler made of it: swizzled
addresses, tensor maps, matrix descriptors, products from registers, clusters. What is asynchronous
on a GPU is asynchronous here, as early or as late as it may be, and accesses that a GPU would not
have ordered are found. See `machine` for what is modelled and what is not.
"""

from sm90.hook import Ran as Ran
from sm90.hook import compiled as compiled
from sm90.hook import emulated as emulated
