"""What the Responses API needs beside its formats: stored responses, and conversations put together from them."""
