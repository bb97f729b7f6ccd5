# The lab: three hosts, their networks and a registry on this machine. Included by the root Makefile.
LAB := PYTHONPATH=tests/lab python -m lockstep_lab

.PHONY: lab lab-down lab-reset

lab: setup ## Start the lab: three hosts with sshd and Docker, a registry, the campaign's starting state
	@$(LAB) up --engine $(ENGINE)

lab-reset: setup ## Put the running lab back to its starting state
	@$(LAB) reset

lab-down: setup ## Remove the lab; caches stay and are named
	@$(LAB) down
