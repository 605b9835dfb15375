// Prints how many tokens llama.cpp decodes per second on two threads of a CPU, without the first eight.
//
//     npm install node-llama-cpp
//     node llamacpp_decode.mjs FILE.gguf...

import {getLlama, LlamaLogLevel} from "node-llama-cpp";

const first = 8, tokens = 128;
const llama = await getLlama({
    gpu: false, build: "never", skipDownload: true, progressLogs: false, logLevel: LlamaLogLevel.error, maxThreads: 2,
});

for (const path of process.argv.slice(2)) {
    const model = await llama.loadModel({modelPath: path});
    const context = await model.createContext({contextSize: 1024, threads: 2});
    const text = context.getSequence().evaluate(model.tokenize("func main"), {temperature: 0});

    let n = 0, from = 0;
    for await (const _ of text) {
        n++;
        if (n === first) from = performance.now();
        if (n === first + tokens) break;
    }
    console.log(`${path}: ${(1000 * (n - first) / (performance.now() - from)).toFixed(1)} tokens/s`);
    await model.dispose();
}

process.exit(0);
