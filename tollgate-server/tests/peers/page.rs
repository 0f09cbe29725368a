//! The pages of `docs/integrations`: their blocks of code are the files that the tests use.

use std::path::Path;

use testkit::port::Port;

/// A page, with the ports of a test in place of those in the text.
pub(crate) struct Page {
    text: String,
    ports: Ports,
}

/// The ports of a test, in place of 8080, 8081, 8090, 8091 and 8092.
pub(crate) struct Ports {
    proxy: Port,
    app: u16,
    http: Port,
    grpc: Port,
    resp: Port,
}

impl Ports {
    /// Reserves ports. `app` is the port of the service behind the proxy.
    pub(crate) fn claim(app: u16) -> Self {
        Self { proxy: Port::claim(), app, http: Port::claim(), grpc: Port::claim(), resp: Port::claim() }
    }
}

impl Page {
    pub(crate) fn read(name: &str, ports: Ports) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/integrations").join(name);
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let Ports { proxy, app, http, grpc, resp } = &ports;
        let (proxy, http, grpc, resp) = (proxy.number(), http.number(), grpc.number(), resp.number());
        let text = [(8080, proxy), (8081, *app), (8090, http), (8091, grpc), (8092, resp)]
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
        self.ports.proxy.number()
    }

    /// Returns the first rule file of the page.
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
