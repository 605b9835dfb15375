'use strict';
// Steer lets a person control a run. Every request is confirmed, sent with the token from the page's
// address, and answered.
const Steer = (() => {
  const $ = id => document.getElementById(id);
  let token = '', control = {allowed: false}, order = null;

  function button(text, act) {
    const b = document.createElement('button');
    b.type = 'button';
    b.textContent = text;
    b.addEventListener('click', act);
    return b;
  }

  function say(text) { $('answer').textContent = text; }

  // confirm asks for confirmation before anything is sent.
  function confirm(question, path, body) {
    order = {path, body};
    $('confirm-text').textContent = question;
    $('confirm-why').value = '';
    $('confirm-who').value = localStorage.getItem('who') || '';
    $('confirm').showModal();
  }

  async function send() {
    $('confirm').close();
    const {path, body} = order, who = $('confirm-who').value.trim();
    localStorage.setItem('who', who);
    say('Sent. Waiting for the end of the step …');
    try {
      const run = 'api/v1/runs/' + Board.shown() + '/';
      let answer = await fetch(run + path, {method: 'POST',
        headers: {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + token},
        body: JSON.stringify({who: who || 'a person', why: $('confirm-why').value, ...body})});
      let result = await answer.json();
      while (answer.ok && result.state === 'pending') {
        say('Pending: the step takes long, and the request waits for its end.');
        await new Promise(next => setTimeout(next, 1000));
        answer = await fetch(run + 'orders/' + result.id);
        result = await answer.json();
      }
      say(answer.ok && result.done ? 'Done.' : 'Rejected: ' + result.error);
    } catch (e) { say('The board cannot be reached, so the result of the request is unknown.'); }
  }

  // permitted reports whether the run can be steered. A run that has ended cannot.
  function permitted(run) { return token && control.allowed && ['waiting', 'running'].includes(run.status.state); }

  // update shows or hides the controls of a run.
  function update(run) {
    if (permitted(run) && !$('control').children.length) panel();
    $('control-section').hidden = !permitted(run);
    if (!permitted(run)) {
      $('steer').hidden = true;
      if ($('confirm').open) $('confirm').close();
    }
  }

  // seed offers the actions that are possible for a seed.
  function seed(run, at, seed, layer) {
    const form = $('steer');
    form.hidden = !permitted(run) || run.status.state !== 'running';
    if (form.hidden) return;
    const key = at.layer + '/' + at.seed + '/' + seed.stage;
    if (form.dataset.key === key) return; // rebuilding the form would discard a person's choice
    form.dataset.key = key;
    const name = seed.place || layer.name + ', seed ' + at.seed;
    const command = c => ({commands: [{layer: at.layer, seed: at.seed, ...c}]});
    const items = [];
    if (seed.stage === 'Dormant') items.push(...germination(at, seed, layer, name, command));
    else for (const to of seed.next || []) {
      items.push(button('Move to ' + to, () => confirm('Move ' + name + ' from ' + seed.stage + ' to ' + to + '?', 'commands',
        command({action: 'Move', to}))));
    }
    if (['Culled', 'Cancelled', 'RolledBack'].includes(seed.stage)) {
      items.push(button('Recycle', () => confirm('Make ' + name + ' dormant again?', 'commands', command({action: 'Recycle'}))));
    }
    form.replaceChildren(...items);
  }

  function germination(at, seed, layer, name, command) {
    const kind = document.createElement('select'), slot = document.createElement('input');
    const label = (text, e) => { const l = document.createElement('label'); l.append(text + ' ', e); return l; };
    for (const k of (control.kinds || {})[seed.site] || []) kind.append(new Option(k, k));
    slot.type = 'number';
    slot.min = 1;
    const slots = layer.slots > 0; // at other sites a blueprint has a size
    slot.value = slots ? Math.min(at.seed + 1, Math.max(1, layer.slots - 1)) : 1;
    const go = button('Germinate', () => confirm('Germinate a ' + kind.value + ' in ' + name + '?', 'commands',
      command({action: 'Germinate', kind: kind.value, [slots ? 'slot' : 'size']: Number(slot.value)})));
    go.id = 'germinate';
    return [label('Blueprint', kind), label(slots ? 'Slot' : 'Size', slot), go];
  }

  function panel() {
    const mode = document.createElement('select'), label = document.createElement('label');
    for (const m of ['Production', 'Sampling', 'Debug', 'Off']) mode.append(new Option(m, m));
    label.append('Telemetry ', mode);
    const save = button('Save now', () => confirm('Save a checkpoint after this step?', 'save', {}));
    const stop = button('Stop', () => confirm('End the run after this step? If it saves checkpoints, it saves one before it ends.', 'stop', {}));
    save.id = 'save';
    stop.id = 'stop';
    const box = document.createElement('p');
    box.className = 'controls';
    box.append(save, stop, label, button('Change telemetry', () => confirm('Change the telemetry of the seeds to ' + mode.value + '?', 'telemetry',
      {mode: mode.value, every: mode.value === 'Sampling' ? 4 : 0})));
    $('control').replaceChildren(box);
  }

  async function learn() {
    try {
      control = await (await fetch('api/v1/control')).json();
    } catch { return; }
    const run = Board.runs.get(Board.shown());
    if (run) update(run);
  }

  function start() {
    const given = new URLSearchParams(location.hash.slice(1)).get('token');
    if (given) {
      sessionStorage.setItem('token', given);
      history.replaceState(null, '', location.pathname); // keep the token out of copied addresses
    }
    token = sessionStorage.getItem('token') || '';
    $('confirm-yes').addEventListener('click', send);
    $('confirm-no').addEventListener('click', () => $('confirm').close());
    learn();
  }

  return {start, seed, learn, update};
})();
