"""The life of groups: rollout, rollback, drain, recovery, admission."""
