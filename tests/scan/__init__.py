"""`make scan`: bandit's findings, secrets in the repository, known vulnerabilities of dependencies."""
