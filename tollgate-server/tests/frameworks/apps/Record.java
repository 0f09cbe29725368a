// Tomcat that records every complete request as a line of JSON, and answers with it: `java Record.java PORT FOLDER`.

import jakarta.servlet.http.HttpServlet;
import jakarta.servlet.http.HttpServletRequest;
import jakarta.servlet.http.HttpServletResponse;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import org.apache.catalina.connector.Connector;
import org.apache.catalina.startup.Tomcat;

public class Record extends HttpServlet {
    @Override
    protected void service(HttpServletRequest request, HttpServletResponse response) throws IOException {
        String body = new String(request.getInputStream().readAllBytes(), StandardCharsets.ISO_8859_1);
        String query = request.getQueryString() == null ? "" : "?" + request.getQueryString();
        String id = request.getHeader("x-id") == null ? "" : request.getHeader("x-id");
        String line = String.format("{\"method\":%s,\"target\":%s,\"id\":%s,\"body\":%s}\n",
            quoted(request.getMethod()), quoted(request.getRequestURI() + query), quoted(id), quoted(body));
        byte[] bytes = line.getBytes(StandardCharsets.UTF_8);
        synchronized (System.out) {
            System.out.write(bytes);
            System.out.flush();
        }
        response.setContentLength(bytes.length);
        response.getOutputStream().write(bytes);
    }

    private static String quoted(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char character : text.toCharArray()) {
            if (character < ' ' || character == '"' || character == '\\') {
                quoted.append(String.format("\\u%04x", (int) character));
            } else {
                quoted.append(character);
            }
        }
        return quoted.append('"').toString();
    }

    public static void main(String[] arguments) throws Exception {
        Tomcat tomcat = new Tomcat();
        tomcat.setBaseDir(arguments[1]);
        Connector connector = new Connector();
        connector.setPort(Integer.parseInt(arguments[0]));
        connector.setProperty("address", "127.0.0.1");
        connector.setProperty("maxHttpRequestHeaderSize", "262144");
        connector.setEncodedSolidusHandling("passthrough");
        connector.setAllowTrace(true);
        tomcat.setConnector(connector);
        var context = tomcat.addContext("", null);
        Tomcat.addServlet(context, "record", new Record());
        context.addServletMappingDecoded("/", "record");
        tomcat.start();
        tomcat.getServer().await();
    }
}
