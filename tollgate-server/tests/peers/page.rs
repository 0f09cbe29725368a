//! The pages of `docs/integrations`: their blocks of code are the files that the tests use.

use std::path::Path;

/// A page, with the ports of a test in place of those in the text.
pub(crate) struct Page {
    text: String,
    ports: Ports,
}

/// The ports that the pages use, and those of a test.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) proxy: u16,
    pub(crate) app: u16,
    pub(crate) http: u16,
    pub(crate) resp: u16,
}

impl Page {
    pub(crate) fn read(name: &str, ports: Ports) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/integrations").join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let Ports { proxy, app, http, resp } = ports;
        let text = [(8080, proxy), (8081, app), (8090, http), (8092, resp)]
            .iter()
            .fold(text, |text, (written, port)| text.replace(&written.to_string(), &port.to_string()));
        Self { text, ports }
    }

    /// Returns the blocks of a language, in their order.
    pub(crate) fn blocks(&self, language: &str) -> Vec<&str> {
        let fenced = self.text.split("```").skip(1).step_by(2);
        let blocks = fenced.filter_map(|block| block.split_once('\n')).filter(|(name, _)| *name == language);
        blocks.map(|(_, text)| text).collect()
    }

    /// Returns the first block of a language.
    pub(crate) fn block(&self, language: &str) -> &str {
        self.blocks(language).first().unwrap_or_else(|| panic!("the page has no block of {language}"))
    }

    /// Returns the port that the proxy listens on.
    pub(crate) fn port(&self) -> u16 {
        self.ports.proxy
    }

    /// Returns the rule file of the page, which comes first.
    pub(crate) fn rules(&self) -> &str {
        self.block("yaml")
    }

    /// Returns the blocks of a language, each with the output below it.
    pub(crate) fn programs(&self, language: &str) -> Vec<(&str, &str)> {
        let programs = self.blocks(language);
        let outputs = self.blocks("text");
        assert_eq!(programs.len(), outputs.len(), "each program has an output");
        programs.into_iter().zip(outputs).collect()
    }
}
