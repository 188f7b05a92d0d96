"""From a parsed request to samples: encoding, submission, streams, best-of ranking, prompt echo."""
