"""The adaptive policy: which trees a step drafts, by what acceptance and costs predict."""
