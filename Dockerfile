# docker build -t tollgate:0.1.0 .
# docker run -p 8080:8080 -p 127.0.0.1:8099:8099 -v "$PWD/rules:/etc/tollgate:ro" tollgate:0.1.0
#
# Rules for a container listen on 0.0.0.0, not on 127.0.0.1. Mount the folder of the rule file rather than the file: an
# editor that replaces the file is then seen.

FROM rust:1-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --profile dist --locked --package tollgate-server

# glibc, certificates and no shell.
FROM gcr.io/distroless/cc-debian12:nonroot
COPY --from=build /src/target/dist/tollgate /usr/local/bin/tollgate
COPY --from=build /src/LICENSE-APACHE /src/LICENSE-MIT /usr/share/doc/tollgate/
# 8080: the gateway; 8090: the decision service; 8099: health and metrics.
EXPOSE 8080 8090 8099
# SIGTERM, which is the default, lets it finish what is under way: give `docker stop` more time than
# gateway.timeouts.drain, with --time.
ENTRYPOINT ["/usr/local/bin/tollgate"]
CMD ["serve", "--config", "/etc/tollgate/tollgate.yaml"]
