// Java's HttpClient as it comes: it offers HTTP/2 by `Upgrade: h2c` in its first request to a server.

import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

class Client {
    /** Prints status and body of the answers to a POST with a length and to one in chunks, from two clients. */
    public static void main(String[] arguments) throws Exception {
        String body = arguments[1];
        send(arguments[0], BodyPublishers.ofString(body));
        send(arguments[0], BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body.getBytes())));
    }

    static void send(String url, BodyPublisher body) throws Exception {
        var request = HttpRequest.newBuilder(URI.create(url)).header("content-type", "application/json").POST(body);
        var answer = HttpClient.newHttpClient().send(request.build(), BodyHandlers.ofString());
        System.out.println(answer.statusCode() + " " + answer.body().replace("\n", "\\n"));
    }
}
