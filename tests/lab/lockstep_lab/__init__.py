"""The lab: three hosts with their own sshd and Docker Engine, their networks and a registry, on one machine.

Run it as ``python -m lockstep_lab up|status|reset|free-spark2|down|purge`` (see ``__main__``).
"""
