"""Agent Mail: send the entries of trails to people and other agents, and post the heads of trails to a witness."""
