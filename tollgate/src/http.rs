//! What an HTTP client is told: headers and bodies of an answer. There is no server in it.
