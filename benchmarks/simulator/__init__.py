"""The real engine over a device that is simulated, on a clock that is simulated.

Scheduler, policies, controllers and admission are the server's own objects. What a step takes is
drawn from a recording of a live server (`jmoe serve --timeline FILE`), so that a policy or a
controller is compared over many seeds in seconds.
"""
