"use strict";

const $ = id => document.getElementById(id);
let conversation = []; // messages so far
let models = [];       // of the server
let chats = true;      // whether the model has a chat template
let answering = null;  // AbortController of the answer in progress

function headers() {
  const key = sessionStorage.getItem("key");
  return {"Content-Type": "application/json", ...(key ? {Authorization: "Bearer " + key} : {})};
}

function fail(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

// problem returns the message and the code of an answer that is an error.
async function problem(response) {
  try {
    const {message, code} = (await response.json()).error;
    return {message, code};
  } catch {
    return {message: `The server answered with the status ${response.status}.`};
  }
}

async function connect() {
  try {
    const response = await fetch("v1/models", {headers: headers()});
    $("key-form").hidden = response.status !== 401;
    if (response.status === 401) {
      fail(sessionStorage.getItem("key") ? "This API key is wrong." : "The server needs an API key.");
      return;
    }
    if (!response.ok) throw new Error((await problem(response)).message);
    models = (await response.json()).data;
    $("models").replaceChildren(...models.map(m => new Option(m.id)));
    $("models").hidden = models.length === 1;
    $("model").classList.toggle("chosen", models.length > 1); // the list shows the name, too
    choose(models[0]);
  } catch (e) {
    fail("The server cannot be reached: " + e.message);
  }
}

// choose makes a model answer from now on.
function choose(model) {
  chats = model.chat;
  $("model").textContent = document.title = model.id;
  fail(chats ? "" : "This model has no chat template, so it continues each text as it is.");
}

function show(role, text) {
  const p = document.createElement("div");
  p.className = "message " + role;
  p.textContent = text;
  $("messages").append(p);
  p.scrollIntoView({block: "end"});
  return p;
}

function note(text) {
  const p = document.createElement("p");
  p.className = "note";
  p.textContent = text;
  $("messages").append(p);
  return p;
}

// events yields the data of a stream of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }
}

function request(text) {
  const settings = {stream: true, model: document.title};
  if ($("temperature").value !== "") settings.temperature = Number($("temperature").value);
  if (!chats) return ["v1/completions", {...settings, prompt: text, max_tokens: 256}];
  const system = $("system").value.trim();
  const first = system ? [{role: "system", content: system}] : [];
  return ["v1/chat/completions", {...settings, messages: [...first, ...conversation]}];
}

async function answer(text) {
  answering = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  fail("");
  const message = show("user", text), messages = conversation;
  messages.push({role: "user", content: text});
  const bubble = show("assistant", "");
  const forgotten = [];
  let all = "", reasoning = null, ending = "";
  try {
    let response;
    for (;;) {
      const [path, body] = request(text);
      response = await fetch(path, {method: "POST", headers: headers(), body: JSON.stringify(body), signal: answering.signal});
      if (response.ok) break;
      if (response.status === 401) $("key-form").hidden = false;
      const {message, code} = await problem(response);
      if (!chats || code !== "context_length_exceeded" || messages.length === 1) throw new Error(message);
      forgotten.push(...messages.splice(0, 2)); // a message and its answer
    }
    if (forgotten.length) bubble.before(note("The conversation is longer than the model's context, so its oldest messages are left out."));
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices[0];
      if (!choice) continue;
      const more = chats ? choice.delta.content : choice.text;
      const thought = chats ? choice.delta.reasoning_content : "";
      if (more || thought) {
        const follow = $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight < 80;
        if (thought && !reasoning) bubble.before(reasoning = show("reasoning", ""));
        if (thought) reasoning.textContent += thought;
        if (more) bubble.textContent = all += more;
        if (follow) bubble.scrollIntoView({block: "end"});
      }
      ending = choice.finish_reason || ending;
      if (choice.finish_reason === "length") {
        note(chats ? "The answer ends here because the model's context is full. From now on, the oldest messages are left out." :
          "The answer ends here because it has reached its limit or filled the model's context.");
      }
    }
  } catch (e) {
    if (e.name !== "AbortError") fail(e.message);
  }
  if (all || ending) {
    messages.push({role: "assistant", content: all});
    if (!all && ending === "stop" && messages === conversation) note("The model ended its answer at once.");
    if (chats && ending === "length") messages.splice(0, 2 * Math.ceil(messages.length / 4)); // makes room for the next answer
  } else { // nothing has been said, so the message can be sent again
    message.remove();
    bubble.remove();
    reasoning?.remove();
    messages.pop();
    messages.unshift(...forgotten);
    if (!$("input").value && messages === conversation) $("input").value = text;
  }
  answering = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("input").focus();
}

$("form").addEventListener("submit", e => {
  e.preventDefault();
  const text = $("input").value;
  if (answering || !text.trim()) return;
  $("input").value = "";
  answer(text);
});
$("input").addEventListener("keydown", e => {
  if (e.key === "Enter" && !e.shiftKey && !e.isComposing) {
    e.preventDefault();
    $("form").requestSubmit();
  }
});
$("models").addEventListener("change", () => choose(models.find(m => m.id === $("models").value)));
$("stop").addEventListener("click", () => answering && answering.abort());
$("new").addEventListener("click", () => {
  if (answering) answering.abort();
  conversation = [];
  $("messages").replaceChildren();
  $("input").focus();
});
$("key-form").addEventListener("submit", e => {
  e.preventDefault();
  sessionStorage.setItem("key", $("key").value);
  connect();
});
connect();
