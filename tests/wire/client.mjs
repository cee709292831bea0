// Node's fetch: a whole answer, then a stream in pieces as they come.

const [url, body] = process.argv.slice(2);

async function send(fields) {
  const answer = await fetch(url, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...JSON.parse(body), ...fields }),
  });
  let text = "";
  for await (const piece of answer.body.pipeThrough(new TextDecoderStream())) text += piece;
  console.log(answer.status, text.replaceAll("\n", "\\n"));
}

await send({});
await send({ stream: true });
